"""Other reductions: in another dtype, by a communication hook, and of sparse gradients."""
