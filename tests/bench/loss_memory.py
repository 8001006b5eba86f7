# Peak memory of one distillation loss with gradients: it grows with the chunk, not with positions x vocabulary.
#   python -m tests.bench.loss_memory
# Each line is measured in a process of its own: the peak of the resident set above what the inputs take. The copy of
# the draft vocabulary's rows (11 MB for 8,192) and the gradients of W_2 are part of it.

import multiprocessing
import resource

NUM_VOCAB, NUM_DRAFT, HIDDEN, RANK = 49152, 8192, 576, 64
# Rows, chunk (0 = naive float32 softmax over all rows at once), reduced vocabulary
CASES = [
    (640, 64, True),
    (640, 256, True),
    (2560, 64, True),
    (2560, 256, True),
    (10240, 256, True),
    (640, 64, False),
    (2560, 64, False),
    (640, 0, True),
    (2560, 0, True),
    (2560, 0, False),
]


def peak_mb(num_rows: int, chunk: int, reduced: bool) -> float:
    """Megabytes that the loss and its gradients add to the process."""
    import torch

    from drafters.losses import LossWeights
    from tests.bench.loss_speed import chunked, make_case, naive

    torch.set_num_threads(1)
    head, inputs = make_case(num_rows, num_draft=NUM_DRAFT if reduced else NUM_VOCAB)
    torch.mm(torch.zeros(8, 8).bfloat16(), torch.zeros(8, 8).bfloat16())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (chunked if chunk else naive)(inputs, head, LossWeights(chunk=chunk or 1))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


if __name__ == "__main__":
    print(f"{'rows':>7} {'chunk':>6} {'draft vocabulary':>17} {'peak MB':>8}")
    for case in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(peak_mb, case)
        num_rows, chunk, reduced = case
        print(f"{num_rows:>7} {chunk or 'naive':>6} {NUM_DRAFT if reduced else NUM_VOCAB:>17} {found:>8.0f}")
