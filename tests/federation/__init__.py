"""Tests of federations over several machines."""
