//! Do programs that people use give the same results with a quarter, and with a tenth, of their memory near?
//!
//! Danger: everything that no probe thought of. Each job is a few seconds natively. With a tenth near more goes wrong, so
//! the CI tier tries that; the deep tier tries both, with larger jobs.

use farfield_tests::{Footprint, Job, deep, program, project, random_lines, random_words, shared_text, tier};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Each job as two tests, so that each says by itself what failed.
macro_rules! at_a_quarter_and_a_tenth {
    ($in_ci:expr; $($name:ident),* $(,)?) => {
        $(mod $name {
            #[test]
            fn is_right_at_25_percent_near() {
                if !super::deep() {
                    return;
                }
                if let Some(mut job) = super::jobs::$name() { job.check(25); }
            }
            #[test]
            fn is_right_at_10_percent_near() {
                if !($in_ci || super::deep()) {
                    return;
                }
                if let Some(mut job) = super::jobs::$name() { job.check(10); }
            }
        })*
    };
}

at_a_quarter_and_a_tenth! { true;
    gnu_sort, gzip, gunzip, pandas, sqlite, redis, openjdk, nodejs, gcc, stress_ng, asynchronous_io, perl, pipeline,
    luajit, go_with_c, go_without_c,
}

// Others stand for these in the CI tier: gzip, gunzip, pandas, and Java with its usual collector.
at_a_quarter_and_a_tenth! { false;
    xz, unxz, numpy, scikit_learn, openjdk_with_zgc,
}

fn source(name: &str) -> PathBuf {
    project().join("tests/programs").join(name)
}

/// Debian's Python with these modules: a version manager's Python has modules of its own.
fn python(modules: &str) -> Option<PathBuf> {
    let python = program("python3")?;
    let found =
        Command::new(&python).args(["-c", &format!("import {modules}")]).output().is_ok_and(|out| out.status.success());
    if !found {
        farfield_tests::skip(&format!("{} has no {modules}", python.display()));
    }
    found.then_some(python)
}

fn text(job: &Job, bytes: usize) -> PathBuf {
    let text = shared_text("win32-en.txt", bytes).unwrap_or_else(|| random_words(bytes, 5).into_bytes());
    job.scratch().file("text", text)
}

/// The same program, packed by the tools of this machine, as input for the unpacking test.
fn packed(tool: &Path, level: &str, text: &Path) -> PathBuf {
    let output = Command::new(tool).args([level, "-c"]).arg(text).output().expect("the tool starts");
    assert!(output.status.success());
    let path = text.with_extension("packed");
    std::fs::write(&path, output.stdout).expect("room in the scratch folder");
    path
}

/// The Java program, compiled.
fn compiled_heap(job: &Job) -> Option<PathBuf> {
    let classes = job.scratch().folder("classes");
    let compiled = Command::new(program("javac")?).arg("-d").arg(&classes).arg(source("Heap.java")).output();
    let compiled = compiled.expect("the compiler starts");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Some(classes)
}

fn minutes(number: u64) -> Duration {
    Duration::from_secs(60 * number * tier(1, 6))
}

mod jobs {
    use super::*;

    pub(crate) fn gnu_sort() -> Option<Job> {
        let size = tier(28_000_000, 160_000_000);
        let sort = program("sort")?;
        let job = Job::new("sort", [sort]).env("LC_ALL", "C").within(minutes(5));
        let lines = random_lines(size / 2, 3) + &random_words(size / 2, 4);
        let input = job.scratch().file("lines", lines);
        Some(job.arg(format!("--buffer-size={}", size * 4)).arg("--parallel=2").arg(input))
    }

    /// Its footprint is small, so nothing need be far: it must be right all the same.
    pub(crate) fn gzip() -> Option<Job> {
        let job = Job::new("gzip", [program("gzip")?]).footprint(Footprint::Any).within(minutes(5));
        let input = text(&job, tier(10_000_000, 100_000_000));
        Some(job.arg("-6cn").arg(input))
    }

    pub(crate) fn gunzip() -> Option<Job> {
        let gzip = program("gzip")?;
        let job = Job::new("gunzip", [&gzip]).footprint(Footprint::Any).within(minutes(5));
        let input = packed(&gzip, "-6", &text(&job, tier(20_000_000, 100_000_000)));
        Some(job.arg("-dc").input(&input))
    }

    pub(crate) fn xz() -> Option<Job> {
        let job = Job::new("xz", [program("xz")?]).within(minutes(10));
        // Two threads: two encoders with trees of their own, eight times as large as a block. Each byte walks one of them from page
        // to page, so with a tenth near more blocks take long and show nothing new.
        let block = tier(800_000, 3_000_000);
        let input = text(&job, tier(2, 4) * block);
        Some(job.args(["-9", "-c", "-T2"]).arg(format!("--block-size={block}")).arg(input))
    }

    pub(crate) fn unxz() -> Option<Job> {
        let xz = program("xz")?;
        let job = Job::new("unxz", [&xz]).within(minutes(5));
        // Its memory is the dictionary: as large as the text.
        let text = job.scratch().file("random", random_lines(tier(24_000_000, 64_000_000), 9));
        let input = packed(&xz, "--lzma2=preset=0,dict=64MiB,depth=1", &text);
        Some(job.arg("-dc").input(&input))
    }

    pub(crate) fn numpy() -> Option<Job> {
        let job = Job::new("numpy", [python("numpy")?]).env("OPENBLAS_NUM_THREADS", "1").within(minutes(10));
        Some(job.arg(source("arrays.py")).arg(tier("2", "16")))
    }

    pub(crate) fn pandas() -> Option<Job> {
        let job = Job::new("pandas", [python("pandas")?]).env("OPENBLAS_NUM_THREADS", "1").within(minutes(10));
        Some(job.arg(source("table.py")).arg(tier("60000", "1500000")))
    }

    pub(crate) fn scikit_learn() -> Option<Job> {
        let job = Job::new("scikit-learn", [python("sklearn.cluster")?]).within(minutes(10));
        let job = job.env("OPENBLAS_NUM_THREADS", "1").env("OMP_NUM_THREADS", "1");
        Some(job.arg(source("clusters.py")).arg(tier("140000", "1500000")))
    }

    pub(crate) fn sqlite() -> Option<Job> {
        let job = Job::new("sqlite", [program("sqlite3")?]).within(minutes(10));
        let script = std::fs::read_to_string(source("database.sql")).expect("part of the project");
        let input = job.scratch().file("script.sql", script.replace("ROWS", tier("120000", "2000000")));
        Some(job.arg(":memory:").input(&input))
    }

    /// Server, clients, snapshot child: a job of many processes under one budget.
    pub(crate) fn redis() -> Option<Job> {
        program("redis-server")?;
        program("redis-cli")?;
        let job = Job::new("redis", [program("sh")?]).within(minutes(10));
        Some(job.arg(source("database.sh")).arg(tier("50000", "600000")))
    }

    pub(crate) fn openjdk() -> Option<Job> {
        let job = Job::new("openjdk", [program("java")?]).within(minutes(10));
        let classes = compiled_heap(&job)?;
        let (heap, megabytes) = tier(("-Xmx256m", "100"), ("-Xmx2g", "900"));
        let job = job.args(["-XX:+UseG1GC", heap, "-cp"]).arg(classes);
        Some(job.args(["Heap", megabytes]))
    }

    /// Its heap is shared memory at addresses that mean something, which stays near.
    pub(crate) fn openjdk_with_zgc() -> Option<Job> {
        let job = Job::new("openjdk-zgc", [program("java")?]).footprint(Footprint::Any).within(minutes(10));
        let classes = compiled_heap(&job)?;
        let (heap, megabytes) = tier(("-Xmx192m", "30"), ("-Xmx1g", "200"));
        Some(job.args(["-XX:+UseZGC", heap, "-cp"]).arg(classes).args(["Heap", megabytes]))
    }

    /// Its compiler needs room for code within the reach of its own; without that nothing is compiled.
    pub(crate) fn luajit() -> Option<Job> {
        let job = Job::new("luajit", [program("luajit")?]).footprint(Footprint::Any).within(minutes(10));
        let script = r#"
            local compiled = 0
            jit.attach(function(what) if what == "stop" then compiled = compiled + 1 end end, "trace")
            local n, s, t = tonumber(arg[1]), 0, {}
            for i = 1, n do t[i] = { i * 7919 % 1000003, "v" .. i } end
            for i = 1, n do s = (s * 31 + t[i][1] + #t[i][2]) % 1000000007 end
            for i = 1, 30000000 do s = (s + i * 7) % 1000003 end
            print(#t, s, compiled > 0)
        "#;
        let script = job.scratch().file("heap.lua", script);
        Some(job.arg(script).arg(tier("40000", "400000")))
    }

    /// Looks where its handlers run, and sends itself signals all the time.
    pub(crate) fn go_with_c() -> Option<Job> {
        go("go-with-c", "1", &["build"])
    }

    /// Its threads have thread pointers of their own.
    pub(crate) fn go_without_c() -> Option<Job> {
        go("go-without-c", "0", &["build", "-buildmode=pie"])
    }

    /// The toolchain takes minutes to build its own library: for the deep tier.
    fn go(name: &str, with_c: &str, build: &[&str]) -> Option<Job> {
        if !deep() {
            return None;
        }
        let job = Job::new(name, [program("sh")?]).within(minutes(10));
        let (folder, cache) = (job.scratch().folder("source"), job.scratch().folder("cache"));
        let mut source = std::fs::read_to_string(source("heap.go")).expect("part of the project");
        if with_c == "1" {
            source = source.replace("import (", "import \"C\"\n\nimport (");
        }
        std::fs::write(folder.join("heap.go"), source).expect("room in the scratch folder");
        std::fs::write(folder.join("go.mod"), "module heap\n\ngo 1.21\n").expect("room in the scratch folder");
        let binary = folder.join("heap");
        let built = Command::new(program("go")?)
            .args(build)
            .arg("-o")
            .arg(&binary)
            .current_dir(&folder)
            .env("CGO_ENABLED", with_c)
            .env("GOCACHE", cache)
            .env("GOTOOLCHAIN", "local")
            .output()
            .expect("the toolchain starts");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        Some(job.arg("-c").arg("exec \"$0\" \"$@\"").arg(binary).arg("400000"))
    }

    pub(crate) fn nodejs() -> Option<Job> {
        let job = Job::new("nodejs", [program("node")?]).within(minutes(10));
        Some(job.arg(source("heap.js")).arg(tier("60000", "800000")))
    }

    /// The compiler proper and the assembler are children of the driver.
    pub(crate) fn gcc() -> Option<Job> {
        let job = Job::new("gcc", [program("gcc")?]).within(minutes(10));
        let mut code = String::new();
        let functions = tier(150, 4000);
        for n in 0..functions {
            let (a, b, c) = (n * 7 + 1, n % 13 + 2, n % 31);
            let _ = writeln!(
                code,
                "static unsigned f{n}(unsigned a, unsigned b) {{ unsigned t[8]; \
                 for (int i = 0; i < 8; i++) t[i] = a * {a}u + (b ^ {n}u) * i; \
                 for (int i = 1; i < 8; i++) {{ if (t[i] & 4) t[i] += t[i-1] / {b}u; else t[i] ^= t[i-1] << {c}; \
                 switch (t[i] % 5) {{ case 0: t[i] += a; break; case 1: t[i] -= b; break; case 2: t[i] = ~t[i]; break; \
                 default: t[i] *= 3u; }} }} return t[7] ^ t[3]; }}"
            );
        }
        let names: Vec<String> = (0..functions).map(|n| format!("f{n}")).collect();
        let _ = writeln!(code, "unsigned (*const table[])(unsigned, unsigned) = {{{}}};", names.join(","));
        let input = job.scratch().file("generated.c", code);
        Some(job.args([tier("-O1", "-O2"), "-c", "-o", "generated.o"]).arg(input))
    }

    /// Checks its own memory, bit by bit, with many access patterns; says by its exit code whether all was right.
    pub(crate) fn stress_ng() -> Option<Job> {
        let job = Job::new("stress-ng", [program("stress-ng")?]).within(minutes(10));
        let job = job.args(["--quiet", "--vm", "2", "--vm-bytes", "128M", "--vm-method", "all", "--verify"]);
        Some(job.args(["--vm-ops", tier("1500", "60000"), "--timeout", tier("60", "300")]).footprint(Footprint::Any))
    }

    /// io_uring and `io_submit`, with somebody beside them who needs the room.
    pub(crate) fn asynchronous_io() -> Option<Job> {
        let job = Job::new("asynchronous-io", [program("stress-ng")?]).within(minutes(10)).footprint(Footprint::Any);
        let job = job.args(["--quiet", "--verify", "--io-uring", "1", "--io-uring-ops", tier("2000", "100000")]);
        let job = job.args(["--aiol", "1", "--aiol-ops", tier("300", "20000"), "--timeout", tier("60", "300")]);
        Some(job.args(["--vm", "1", "--vm-bytes", "64M", "--vm-ops", tier("200", "20000")]))
    }

    pub(crate) fn perl() -> Option<Job> {
        let job = Job::new("perl", [program("perl")?]).within(minutes(10));
        let script = r#"
            my ($n, $s, %h) = (shift, 0);
            for my $i (1 .. $n) { $h{"key " . ($i * 7919 % 1000003)} = [$i, "v$i"]; }
            for my $k (sort keys %h) { $s = ($s * 31 + $h{$k}[0] + length $h{$k}[1]) % 1000000007 }
            print scalar(keys %h), " $s\n";
        "#;
        Some(job.arg("-e").arg(script).arg(tier("50000", "900000")))
    }

    /// A shell with several programs at once, sharing one budget.
    pub(crate) fn pipeline() -> Option<Job> {
        let job = Job::new("pipeline", [program("sh")?]).env("LC_ALL", "C").within(minutes(5));
        program("xz")?;
        let input = job.scratch().file("words", random_words(tier(9_000_000, 60_000_000), 8));
        let script = "tr ' ' '\\n' < \"$0\" | sort -S 300M | uniq -c | sort -k1,1nr -k2 > counts; \
                      xz -6 -T1 -c counts | xz -dc | cmp - counts && wc -l < counts; (gzip -1 -c \"$0\" | wc -c) & \
                      awk '{ for (i = 1; i <= NF; i++) n[$i] += NR } END { for (w in n) t += n[w]; print length(n), t }' \"$0\" > sums; wait";
        Some(job.arg("-c").arg(script).arg(input).footprint(if deep() { Footprint::Heap } else { Footprint::Any }))
    }
}
