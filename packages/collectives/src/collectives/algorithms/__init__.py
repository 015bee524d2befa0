"""The textbook algorithms by messages, and which function does which collective."""
