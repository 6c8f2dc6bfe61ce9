"""The classes from which a method is built; users import them from `lit_fed.algorithm`."""
