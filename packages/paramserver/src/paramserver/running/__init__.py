"""Servers and workers as processes: started, watched, ended."""
