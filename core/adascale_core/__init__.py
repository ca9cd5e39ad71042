"""The rules of AdaScale Operator, without side effects.

The packages `adascale_worker`, `adascale_api`, `adascale_controller` and `adascale_client` import this
package. It imports only the standard library, and no module that reads a clock, a file, a socket or the
environment: the caller passes these values in.

- Batch sizes and gain: `batch`, `gain`, `throughput`.
- The decision on replica counts: `decision`, `job_state`, `job_utility`, `prediction`, `exact_allocation`,
  `hill_climbing`, `capacity`, `packing`.
- Generations of replicas: `rendezvous`, `failure_count`.
- What several packages agree on: `names`, `job_id`, `messages`, `views`, `exit_codes`, `termination_message`,
  `checkpoint_manifest`, `errors`.
"""
