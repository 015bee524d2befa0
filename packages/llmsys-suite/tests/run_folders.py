"""Run folders that tests fill themselves."""

from llmsys_suite import RunFolder, claim_folder


def create_folder(config, environment):
    """Claim the folder of a configuration, and write the facts of a machine into it."""
    folder = RunFolder(claim_folder(config).out)
    folder.write_json("env.json", environment)
    return folder
