"""Support code of the registered backend: method decorators, arguments and torch's backends."""
