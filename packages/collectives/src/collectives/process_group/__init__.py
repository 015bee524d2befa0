"""The parts of the registered backend that are not methods: arguments and other backends."""
