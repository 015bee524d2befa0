"""Networks that compute with integers from end to end, and their export to C and ONNX."""
