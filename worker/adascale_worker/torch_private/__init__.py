"""Everything the worker uses of torch that torch does not document: no other package may use such a name.

Each function names the private part that it uses and why the public interface is not enough. Each module has
the parts of one subject of torch. A part that the installed torch does not have raises
`UnsupportedTorchError`, with its name and the version.

The tests of the worker pass with these versions:

- torch 2.9.0, the lowest that `pyproject.toml` allows. Up to 2.7, a process can wait forever while it
  destroys a process group (github.com/pytorch/pytorch/pull/154976), thus at any change of the replicas. Up to
  2.8, gradients of `fully_shard` (FSDP2) cannot be read (`FSDPModule.set_custom_reduce_scatter`);
- torch 2.15.0, the version in `requirements.lock`.
"""
