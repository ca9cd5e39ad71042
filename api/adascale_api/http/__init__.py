"""HTTP, for routes of any kind: connections and their limits, TLS, and the bodies of requests."""
