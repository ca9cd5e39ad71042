"""Types that the phases share: API objects, conditions, actions, settings.

Data only: no I/O, no clock, no decision. Imports no other package of the operator.
"""
