// A program in JavaScript, as a workload: a map of objects, used by Zipf's law. people.js node [--data-mib N] [--ops N] [--seed N]. Prints the same line as our own programs.
if (process.argv.includes("--check")) {
    process.exit(0);
}
const options = {"data-mib": 64, ops: 1000, seed: 1};
for (let at = 3; at + 1 < process.argv.length; at += 2) {
    options[process.argv[at].slice(2)] = Number(process.argv[at + 1]);
}
const count = Math.floor(options["data-mib"] * 1048576 / 860);

// xorshift32.
let state = options.seed || 1;
function random() {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) / 4294967296;
}

// Zipf's law with exponent 1: the logarithm of a rank is uniform. Popular keys lie anywhere.
function key() {
    return Number(BigInt(Math.floor(count ** random())) * 0x9E3779B1n % BigInt(count));
}

const phases = [];
function timed(name, ops, action) {
    const [begun, before] = [process.hrtime.bigint(), process.resourceUsage()];
    action();
    const after = process.resourceUsage();
    const cpu = (used) => (used.userCPUTime + used.systemCPUTime) / 1e6;
    phases.push({
        name, ops, seconds: Number(process.hrtime.bigint() - begun) / 1e9, cpu_seconds: cpu(after) - cpu(before),
        faults_major: after.majorPageFault - before.majorPageFault,
        faults_minor: after.minorPageFault - before.minorPageFault,
    });
}

const users = new Map();
timed("fill", count, () => {
    for (let id = 0; id < count; id++) {
        const visits = Array.from({length: 8}, (_, at) => id + at);
        users.set(`user ${id}`, {id, name: `${id}`.padStart(100, "x"), score: id / 3, visits});
    }
});
let found = 0;
timed("use", options.ops, () => {
    for (let at = 0; at < options.ops; at++) {
        const id = key();
        const user = users.get(`user ${id}`);
        if (user.id !== id) {
            throw new Error(`${id} is ${user.id}`);
        }
        found += user.visits[at % 8] + user.name.length;
        if (at % 10 === 0) {
            user.visits = user.visits.map((one) => one + 1);
        }
    }
});
console.log(JSON.stringify({phases, checksum: found.toString(16), verified: true, errors: 0}));
