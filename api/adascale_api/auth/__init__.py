"""Who may do what: roles, and the tokens that prove them.

`authorization` has the interface and shared tokens, `service_accounts` the tokens that a cluster verifies.
Only `kubernetes_token_review` imports the Kubernetes client.
"""
