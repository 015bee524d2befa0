"""Step 8: store the model in fewer bytes and measure what that costs (tinyml)."""

from model import FOLDER, compute_held_out_loss, load_trained_model, save_lines
from tinyml import kmeans_quantize, prune, quantize, save, size_of

model = load_trained_model()
variants = {
    "float32": model,
    "8 bits, linear": quantize(model, bits=8),
    "4 bits, linear": quantize(model, bits=4, group_size=32),
    "4 bits, k-means": kmeans_quantize(model, bits=4),
    "half of the weights": prune(model, 0.5).model,
}
lines = {}
uncompressed_loss = compute_held_out_loss(model)
for name, small in variants.items():
    size, loss = size_of(small).sparse_bytes, compute_held_out_loss(small)
    lines[name] = [(size / 1024, loss - uncompressed_loss)]
    print(f"{name}: {size:,} bytes, {loss:.3f} nats per byte")
save_lines("compress", lines)
save(variants["4 bits, linear"], FOLDER / "small.safetensors")
