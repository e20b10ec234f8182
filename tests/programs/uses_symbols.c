// A program with a library of many symbols: says whether it was loaded.
#include <stdio.h>

int answer(void);

int main(void) {
    printf("the library says %d\n", answer());
    return 0;
}
