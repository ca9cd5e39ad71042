"""The databases: connections, transactions, and what their errors mean.

`base` has the interface; `sqlite` and `postgresql` implement it. Nothing else depends on which one is used.
"""
