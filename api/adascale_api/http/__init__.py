"""HTTP, for routes of any kind: connections and their limits, bodies, files, the OpenAPI document."""
