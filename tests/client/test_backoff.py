"""The waiting times of a client whose requests fail."""

from hypothesis import given
from hypothesis import strategies as st

from adascale_client import Backoff
from adascale_client.transport import MAX_BACKOFF, MIN_BACKOFF


@given(st.lists(st.booleans(), max_size=40))
def test_waiting_times_double_up_to_a_limit_and_start_again_after_a_success(succeeds: list[bool]) -> None:
    backoff = Backoff()
    failures = 0
    for success in succeeds:
        if success:
            backoff.reset()
            failures = 0
            continue
        longest = min(MIN_BACKOFF * 2.0**failures, MAX_BACKOFF)
        assert longest / 2 <= backoff.next() <= longest
        failures += 1


@given(st.integers(0, 10))
def test_clients_that_fail_together_wait_for_different_times(failures: int) -> None:
    clients = [Backoff() for _ in range(100)]
    for _ in range(failures):
        for client in clients:
            client.next()
    times = [client.next() for client in clients]
    assert len(set(times)) > 90
    # Each half of the possible times has some: a probability of 2 in 2**100 that one has none.
    middle = 0.75 * min(MIN_BACKOFF * 2.0**failures, MAX_BACKOFF)
    assert min(times) < middle < max(times)
