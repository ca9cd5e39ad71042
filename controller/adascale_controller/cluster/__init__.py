"""The jobs of a Kubernetes cluster, as the command line reads and changes them: as `local` for one machine.

With the rights of the user's kubeconfig, and nothing else: no port-forward, no service account of its own.
Only `kubernetes_api` may import the Kubernetes client. The operator is another program, which this package
changes through AdaScaleJobs alone.
"""
