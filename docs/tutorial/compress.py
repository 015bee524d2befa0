"""Step 8: store the model in fewer bytes and measure what that costs (tinyml)."""

from model import FOLDER, held_out_loss, store, trained
from tinyml import kmeans_quantize, prune, quantize, save, size_of

model = trained()
variants = {
    "float32": model,
    "8 bits, linear": quantize(model, bits=8),
    "4 bits, linear": quantize(model, bits=4, group_size=32),
    "4 bits, k-means": kmeans_quantize(model, bits=4),
    "half of the weights": prune(model, 0.5).model,
}
lines = {}
whole = held_out_loss(model)
for name, small in variants.items():
    size, loss = size_of(small).sparse_bytes, held_out_loss(small)
    lines[name] = [(size / 1024, loss - whole)]
    print(f"{name}: {size:,} bytes, {loss:.3f} nats per byte")
store("compress", lines)
save(variants["4 bits, linear"], FOLDER / "small.safetensors")
