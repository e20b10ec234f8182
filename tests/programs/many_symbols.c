// A library with many symbols that exist once in a process, as the templates of C++ make them: the loader keeps a table of
// them, which is larger than what is far-capable.
__asm__(".pushsection .data\n"
        ".macro symbol\n"
        ".globl once_\\@\n"
        ".type once_\\@, @gnu_unique_object\n"
        ".size once_\\@, 8\n"
        "once_\\@: .quad once_\\@\n"
        ".endm\n"
        ".rept 5000\n"
        "symbol\n"
        ".endr\n"
        ".popsection\n");

int answer(void) {
    return 42;
}
