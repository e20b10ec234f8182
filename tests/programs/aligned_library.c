// A library whose segments are aligned to 2 MiB: before it is mapped, the loader reserves room for it.
int answer(void) { return 42; }
