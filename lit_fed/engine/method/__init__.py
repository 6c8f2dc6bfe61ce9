"""What a method is written with; users import it from `lit_fed.algorithm`."""
