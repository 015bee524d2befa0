"""The best learning rate of a small language model by batch size.

    python learning_rate.py

`scaling.sweep_learning_rate` calls a function that returns the final loss for a rate, a batch size
and a seed. Here this function trains a decoder on text. As long as the noise of the gradient limits
a step, a larger batch allows a higher rate.
"""

import torch
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.text.data import load_corpus
from scaling import Sweep, sweep_learning_rate

RATES = [1e-3 * 2**i for i in range(7)]
BATCH_SIZES = [1, 4, 16, 64]
CONFIG = ModelConfig(d_model=32, d_ff=96, num_layers=2, num_heads=2, context=64)


def final_loss(rate: float, batch: int, seed: int, steps: int = 100) -> float:
    """Return the held-out loss in nats per byte after `steps` steps of `batch` rows each."""
    torch.manual_seed(seed)
    model, corpus = Decoder(CONFIG), load_corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for step in range(steps):
        loss = model.compute_loss(
            *corpus.draw_batch(rows=batch, context=CONFIG.context, seed=seed, step=step)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(
            model.compute_loss(*corpus.build_heldout_batch(rows=64, context=CONFIG.context))
        )


def main() -> Sweep:
    """Print the losses of all rates and batch sizes, and the best rate of each."""
    sweep = sweep_learning_rate(final_loss, rates=RATES, batch_sizes=BATCH_SIZES, seeds=3)
    for batch, rate in zip(sweep.batch_sizes, sweep.best_rates, strict=True):
        print(f"batch {batch:3.0f}: best rate {rate:.4f}")
    return sweep


if __name__ == "__main__":
    main()
