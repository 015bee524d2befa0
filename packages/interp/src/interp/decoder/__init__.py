"""Models with every circuit within reach: attention alone, GPT-2, and any decoder's description."""
