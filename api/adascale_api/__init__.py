"""The metrics service, which stores the gain reports of workers and the allocations of the controller.

This package may import FastAPI, uvicorn, pydantic, psycopg, the Prometheus client and the Kubernetes
client. `data` does not depend on HTTP. The package makes no decisions: `adascale_core` decides
which batch is valid and when an allocation becomes active. The service stores the result and answers
requests.
"""
