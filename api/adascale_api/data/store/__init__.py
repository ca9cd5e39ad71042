"""The stored data of jobs, as functions of a transaction.

Functions that change a job first select its row for update, so that processes that share a database change a
job in turn. A change of a job's rendezvous increments the job's version; nothing else does.
"""
