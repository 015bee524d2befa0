"""The journal of a server, from which it continues after its process was killed."""

from paramserver.journal.disk_journal import DiskFullError, DiskJournal, restore
from paramserver.journal.files import JournalError
from paramserver.journal.recovery import journal_folders, recover, require_journals

__all__ = [
    "DiskFullError",
    "DiskJournal",
    "JournalError",
    "journal_folders",
    "recover",
    "require_journals",
    "restore",
]
