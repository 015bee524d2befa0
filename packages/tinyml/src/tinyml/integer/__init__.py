"""Networks that compute with whole numbers from end to end, and their export to C and ONNX."""
