"""One model that is split over ranks: by rows, by blocks and inside each block."""
