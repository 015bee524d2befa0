"""Preparation of the fork server from which the tests' processes are forked."""

from paramserver.running.launch import PRELOADED

# A forked process imports the file of its test, and with it these modules, unless the fork server
# has imported them. That takes longer than all other work of a short run.
PRELOADED.extend(["pytest", "hypothesis", "torch.testing", "zmq"])
