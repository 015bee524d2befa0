"""Networks that compute with whole numbers from end to end, and their ways out to a device."""
