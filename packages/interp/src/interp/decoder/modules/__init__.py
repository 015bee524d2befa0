"""The modules of a decoder, built from weights with canonical names."""
