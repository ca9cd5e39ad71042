"""Chooses one option of each job such that their total utility is the highest that the resources allow.

It is a multiple-choice knapsack problem. With one resource it is solved exactly, by dynamic programming, as
long as that is fast. Otherwise each resource gets a price, that of the dual problem, at which each job takes
the option that is worth most to it after it has paid, as far as these fit. Exchanges between two jobs then
use what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

IMPOSSIBLE = -(10**18)
"""Below each sum of utilities."""
MAX_EXACT_WORK = 10_000_000
"""Above this product of options and units of the resource, the choice is not exact."""
ITERATIONS = 40
"""Steps of the search for prices, for each pair of resources."""
CORE = 400
"""The options that exchanges consider: those that lose least at the prices."""
MAX_EXCHANGES = 100


@dataclass(frozen=True)
class Options:
    """The options of some jobs, job by job, and the resources that they take."""

    job: Integers  # the index of the job of each option, ascending; each job has an option
    utility: Integers
    usage: Floats  # what each option takes, of shape (options, resources)
    least: Integers  # for each job, the index of an option; these fit together
    totals: Floats  # the resources

    @cached_property
    def starts(self) -> Integers:
        """The index of the first option of each job."""
        return np.searchsorted(self.job, np.arange(len(self.least)))

    def rows(self) -> list[slice]:
        """Return where the options of each job are."""
        ends = np.append(self.starts[1:], len(self.job))
        return [slice(*each) for each in zip(self.starts.tolist(), ends.tolist(), strict=True)]

    def total(self, chosen: Integers) -> int:
        """Return the total utility of some options."""
        return int(self.utility[chosen].sum())

    def free(self, chosen: Integers) -> Floats:
        """Return what some options leave of the resources."""
        free: Floats = self.totals - self.usage[chosen].sum(axis=0)
        return free

    def best(self, worth: Floats | Integers) -> Integers:
        """Return the option of each job that is worth most; of several, the first."""
        highest = np.flatnonzero(worth == np.maximum.reduceat(worth, self.starts)[self.job])
        return highest[np.searchsorted(self.job[highest], np.arange(len(self.least)))]


def solve(options: Options, present: Integers | None = None) -> Integers:
    """Return the index of the chosen option of each job.

    `present` options, if they fit, are changed only for a higher total utility.
    """
    if not len(options.least):
        return options.least
    chosen = options.best(options.utility)
    if (options.free(chosen) >= 0).all():
        return chosen
    if options.usage.shape[1] == 1 and len(options.job) * options.totals[0] <= MAX_EXACT_WORK:
        return _solve_exactly(options)
    prices = _prices(options)
    found = [_exchange(options, prices, _take(options, prices))]
    if present is not None and (options.free(present) >= 0).all():
        found.insert(0, _exchange(options, prices, present))
    return max(found, key=options.total)


def _solve_exactly(options: Options) -> Integers:
    """Return the best options that take whole units of one resource, with more for earlier jobs if equal."""
    units = options.usage[:, 0].astype(np.int64)
    total = int(min(options.totals[0], np.maximum.reduceat(units, options.starts).sum()))
    rows = options.rows()
    # best[-1 - i][free] is the highest utility of the jobs from the i-th on, with these free units.
    best = [np.zeros(total + 1, dtype=np.int64)]
    for row in reversed(rows):
        table = np.full(total + 1, IMPOSSIBLE, dtype=np.int64)
        for number, utility in zip(units[row].tolist(), options.utility[row].tolist(), strict=True):
            if number <= total:
                np.maximum(table[number:], best[-1][: total + 1 - number] + utility, out=table[number:])
        best.append(table)
    chosen, free = [], total
    for row, rest in zip(rows, reversed(best[:-1]), strict=True):
        fitting = row.start + np.flatnonzero(units[row] <= free)
        reached = rest[free - units[fitting]] + options.utility[fitting]
        most = fitting[reached == reached.max()]
        chosen.append(int(most[units[most].argmax()]))
        free -= int(units[chosen[-1]])
    return np.array(chosen)


def _prices(options: Options) -> Floats:
    """Return what a unit of each resource is worth, by bisection or the ellipsoid method.

    At the best prices the jobs take what there is (Grötschel, Lovász and Schrijver 1981).
    """
    prices = np.zeros(len(options.totals))
    taken = options.usage[options.best(options.utility)].sum(axis=0)
    scarce = np.flatnonzero(taken > options.totals)
    # In units in which all of each resource, and all utility, are 1.
    units = np.maximum(options.totals[scarce], 1e-9)
    usage = options.usage[:, scarce] / units
    highest = np.maximum.reduceat(options.utility, options.starts)
    worth = max(float((highest - options.utility[options.least]).sum()), 1.0)
    utility = (options.utility - highest[options.job]) / worth

    def unused(center: Floats) -> Floats:
        """Return the share of each resource that is not used at some prices."""
        shares: Floats = 1 - usage[options.best(utility - usage @ center)].sum(axis=0)
        return shares

    number = len(scarce)
    if number == 1:
        low, high = np.zeros(1), np.ones(1)
        for _ in range(ITERATIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if unused(middle)[0] < 0 else (low, middle)
        prices[scarce] = high * worth / units
        return prices
    center, shape = np.full(number, 0.5), np.eye(number) * number / 4
    for _ in range(ITERATIONS * number * number):
        negative = np.flatnonzero(center < 0)
        gradient = -np.eye(number)[negative[0]] if len(negative) else unused(center)
        along = shape @ gradient
        size = float(gradient @ along)
        if size <= 1e-24:
            break
        step = along / np.sqrt(size)
        center = center - step / (number + 1)
        shape = number**2 / (number**2 - 1) * (shape - 2 / (number + 1) * np.outer(step, step))
    prices[scarce] = np.maximum(center, 0.0) * worth / units
    return prices


def _take(options: Options, prices: Floats) -> Integers:
    """Return the options that are worth most at some prices, as far as they fit beside the least ones."""
    worth = options.utility - options.usage @ prices
    chosen, free = options.least.copy(), options.free(options.least)
    best, rows = options.best(worth), options.rows()
    for i in np.argsort(worth[chosen] - worth[best], kind="stable").tolist():
        extra = options.usage[best[i]] - options.usage[chosen[i]]
        if (extra > free).any():
            row = rows[i]
            fits = (options.usage[row] - options.usage[chosen[i]] <= free).all(axis=1)
            best[i] = row.start + int(np.where(fits, worth[row], -np.inf).argmax())
            extra = options.usage[best[i]] - options.usage[chosen[i]]
        chosen[i] = best[i]
        free = free - extra
    return chosen


def _exchange(options: Options, prices: Floats, chosen: Integers) -> Integers:
    """Change the options of one or two jobs at a time, as long as that raises the total utility."""
    worth = options.utility - options.usage @ prices
    loss = np.maximum.reduceat(worth, options.starts)[options.job] - worth
    core = np.sort(np.argsort(loss, kind="stable")[:CORE])
    chosen, free, jobs = chosen.copy(), options.free(chosen), options.job[core]
    for _ in range(MAX_EXCHANGES):
        now = chosen[jobs]
        # The last one changes nothing: a job may change alone.
        gain = np.append(options.utility[core] - options.utility[now], 0)
        extra = np.append(options.usage[core] - options.usage[now], np.zeros((1, len(free))), axis=0)
        rising = np.flatnonzero(gain > 0)
        if not len(rising):
            break
        fits = jobs[rising][:, None] != np.append(jobs, -1)
        for i, have in enumerate(free.tolist()):
            fits &= extra[rising, i][:, None] + extra[:, i] <= have
        totals = np.where(fits, gain[rising][:, None] + gain, 0)
        first, second = divmod(int(totals.argmax()), totals.shape[1])
        if totals[first, second] <= 0:
            break
        for index in (int(rising[first]), second):
            if index < len(core):
                free = free - extra[index]
                chosen[jobs[index]] = core[index]
    return chosen
