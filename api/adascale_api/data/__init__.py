"""The stored jobs: the tables, the databases, and the functions that read and change them.

The event loop uses `database`. `store` has the functions of a transaction. `backend` has the interface of a
database, which `sqlite` and `postgresql` implement. Nothing here depends on HTTP.
"""
