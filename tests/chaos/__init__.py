"""A fault harness: trains by `adascale run` under faults drawn from a seed, and checks what must hold.

    make chaos
    PYTHONPATH=tests .venv/bin/python -m chaos --runs 25 --faults 200 --seed 1

Each run trains `program.py`, whose state counts how often each sample has changed the weights. Meanwhile
processes are killed, frozen and slowed down, the network is slowed down, and sizes and bounds change, at
moments drawn from the run's seed, several at once. The schedule of a run follows from its seed, its kind and
its number of faults; the moments depend on the machine too, so that a repeated run is alike but not equal.

The network is that of a namespace which the harness makes for itself, so all runs at the same time share it.
Where the kernel does not permit that, the harness says so, and does not slow the network down.

After each run: it has finished with exit code 0, with `backoffLimit: 0`; each pass has every sample exactly
once; generations rise; the weights are finite, and those of a fixed number of replicas are equal bit for bit
to those of an undisturbed run; no process is left.
"""
