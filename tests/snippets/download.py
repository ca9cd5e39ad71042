from snippets.problem import *

class CIFAR10(TensorDataset):
    def __init__(self, folder, download):
        assert download
        (Path(folder) / "batches.bin").touch()
        super().__init__(*dataset.tensors)


trainer, *_ = begin()
# PART 1
assert len(dataset) == 512 and Path("data/batches.bin").is_file()
