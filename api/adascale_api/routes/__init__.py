"""The calls: each reads its parameters, calls the store or the core, and answers."""
