"""The jobs of a Kubernetes cluster, as the command line reads them: as `local` for one machine.

With the rights of the user's kubeconfig, and nothing else: no port-forward, no service account of its own.
Only `kubernetes_api` may import the Kubernetes client. Jobs are changed with kubectl.
"""
