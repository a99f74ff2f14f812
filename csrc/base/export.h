#pragma once

// Marks what libnwor_specpv.so exports. The library is built with hidden visibility, so a name
// without this mark is private to it.
#define NWOR_EXPORT __attribute__((visibility("default")))
