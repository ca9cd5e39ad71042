"""The routes of the service. Each reads its parameters, calls the store or the core, and answers."""
