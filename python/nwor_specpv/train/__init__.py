"""Training of draft heads: `python -m nwor_specpv.train.eagle3 --help`."""
