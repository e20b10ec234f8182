// Needs a library with larger alignment than a page.
#include "probe.h"

int answer(void);

int main(void) {
    char *area = anon(24 * MIB);
    fill(area, 24 * MIB, 1);
    press();
    say("the library says %d, far memory: %zu wrong", answer(), wrong(area, 24 * MIB, 1));
    return 0;
}
