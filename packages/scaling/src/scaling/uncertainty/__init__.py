"""How sure a law is: resampling, profiles, and what earlier cuts would have foretold."""
