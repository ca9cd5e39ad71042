"""The rules of AdaScale Operator, without side effects.

The packages `adascale_worker`, `adascale_api`, `adascale_controller` and `adascale_client` import this
package. It imports only the standard library, and no module that reads a clock, a file, a socket or the
environment: the caller passes these values in.

- Batch sizes and the gain: `batch`. The time of a step and the goodput: `performance`.
- The decision on replica counts: `decision`, for the nodes of a cluster: `placement`.
- Generations of replicas: `rendezvous`, `failures`.
- What several packages exchange: `messages`, and `views`, the answers of the metrics service.
- What several packages agree on: `names`, `job_id`, `checkpoint_manifest`, `errors`.
"""
