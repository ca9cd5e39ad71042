from snippets.problem import *

if __name__ == "__main__":
    state = {"data": {"position": 0, "samples": len(dataset)}}
    # PART 1
        assert len(x) == len(y) == 32
        # PART 2
        if loader.position == 320:
            break
    assert state["data"] == {"position": 320, "samples": len(dataset)}
