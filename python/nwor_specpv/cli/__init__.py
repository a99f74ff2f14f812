"""The command line: `nwor-specpv`. Commands are imported when they are called."""
