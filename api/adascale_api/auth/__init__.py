"""Who may do what: roles, and the tokens that prove them.

`authorization` has the interface. A shared token, a token for readers and the tokens of service accounts
implement it. Only `kubernetes_token_review` imports the Kubernetes client.
"""
