import java.io.ByteArrayOutputStream;
import java.lang.ref.WeakReference;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.atomic.AtomicReferenceArray;

/** An incremental build engine whose texts are edited: `bench/work/build_engine.rs` in Java. */
final class BuildEngine {
    /** Texts of a chapter. */
    private static final int TEXTS = 64;
    private static final int TEXT_BYTES = 3000;
    /** Edits after which the book is brought up to date. */
    private static final long EDITS_PER_BUILD = 50;
    /** What a text takes in the Rust program on std's types; the number of texts follows from it. */
    private static final long TEXT_DATA_BYTES = 4500;

    /** Task of the graph, with the value that it has computed last; threads could share it. */
    private static final class Task {
        final long key;
        /** Revision in which the value has changed last. */
        volatile long changed;
        /** Revision in which the value was known to be right. */
        volatile long verified;
        volatile byte[] value;
        /** Text of a task without dependencies. */
        volatile byte[] source;
        final AtomicReferenceArray<Task> dependencies;
        /** Task that depends on this one. */
        final Task parent;
        /** Neighbour that was computed before this one, if it still exists. */
        final WeakReference<Task> before;

        Task(long key, int dependencies, Task parent, Task before) {
            this.key = key;
            this.dependencies = dependencies == 0 ? null : new AtomicReferenceArray<>(dependencies);
            this.parent = parent;
            this.before = before == null ? null : new WeakReference<>(before);
        }

        boolean isVerified() {
            return verified > 0;
        }
    }

    /** Engine: its root is the book's task. */
    private static final class Engine {
        final Task book;
        long revision = 1;
        /** Tasks that were computed. */
        long computed;

        Engine(int chapters) {
            book = new Task(0, chapters, null, null);
            for (int chapter = 0; chapter < chapters; chapter++) {
                book.dependencies.set(chapter, new Task(1 + chapter, TEXTS, book, null));
            }
        }

        /** Puts a text in place, with a new task. */
        void replace(int chapter, int text, byte[] source) {
            revision++;
            Task parent = book.dependencies.get(chapter);
            Task before = text == 0 ? null : parent.dependencies.get(text - 1);
            Task task = new Task(text, 0, parent, before);
            task.changed = revision;
            task.source = source;
            parent.dependencies.set(text, task);
            parent.verified = 0;
            book.verified = 0;
        }

        /** Changes a text in place. */
        void edit(int chapter, int text, byte[] source) {
            revision++;
            Task task = book.dependencies.get(chapter).dependencies.get(text);
            task.source = source;
            for (Task stale = task; stale != null; stale = stale.parent) {
                stale.verified = 0;
            }
        }

        private void finish(Task task, byte[] value) {
            computed++;
            if (!Arrays.equals(task.value, value)) {
                task.value = value;
                task.changed = revision;
            }
            task.verified = revision;
        }

        private long buildText(Task task) {
            if (!task.isVerified()) {
                finish(task, encode(countWords(task.source)));
            }
            return task.changed;
        }

        private void buildChapter(Task task) {
            if (task.isVerified()) {
                return;
            }
            boolean hasValue = task.value != null;
            long newest = 0;
            for (int text = 0; text < TEXTS; text++) {
                newest = Math.max(newest, buildText(task.dependencies.get(text)));
            }
            if (hasValue && newest <= task.changed) {
                task.verified = revision;
                return;
            }
            TreeMap<String, Integer> table = new TreeMap<>();
            for (int text = 0; text < TEXTS; text++) {
                addTable(table, task.dependencies.get(text).value);
            }
            finish(task, encode(table));
        }

        /** Brings everything up to date, and returns the table of the book. */
        TreeMap<String, Integer> build() {
            if (!book.isVerified()) {
                TreeMap<String, Integer> table = new TreeMap<>();
                for (int chapter = 0; chapter < book.dependencies.length(); chapter++) {
                    Task task = book.dependencies.get(chapter);
                    buildChapter(task);
                    addTable(table, task.value);
                }
                finish(book, encode(table));
            }
            TreeMap<String, Integer> table = new TreeMap<>();
            addTable(table, book.value);
            return table;
        }

        /** Returns the keys of a text and of those that were computed before it, as far as their tasks exist. */
        List<Long> neighbours(int chapter, int text) {
            List<Long> keys = new ArrayList<>();
            Task task = book.dependencies.get(chapter).dependencies.get(text);
            while (task != null) {
                keys.add(task.key);
                task = task.before == null ? null : task.before.get();
            }
            return keys;
        }
    }

    private static byte[] encode(TreeMap<String, Integer> table) {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        table.forEach((word, count) -> {
            bytes.write(word.length());
            bytes.writeBytes(word.getBytes(StandardCharsets.ISO_8859_1));
            for (int shift = 0; shift < 32; shift += 8) {
                bytes.write(count >>> shift);
            }
        });
        return bytes.toByteArray();
    }

    private static void addTable(TreeMap<String, Integer> table, byte[] bytes) {
        int at = 0;
        while (at < bytes.length) {
            int length = bytes[at] & 0xFF;
            String word = new String(bytes, at + 1, length, StandardCharsets.ISO_8859_1);
            at += 1 + length;
            int count = 0;
            for (int place = 3; place >= 0; place--) {
                count = count << 8 | bytes[at + place] & 0xFF;
            }
            at += 4;
            table.merge(word, count, Integer::sum);
        }
    }

    private static TreeMap<String, Integer> countWords(byte[] text) {
        TreeMap<String, Integer> table = new TreeMap<>();
        for (String word : words(text)) {
            table.merge(word, 1, Integer::sum);
        }
        return table;
    }

    private static List<String> words(byte[] text) {
        List<String> words = new ArrayList<>();
        int start = 0;
        for (int at = 0; at <= text.length; at++) {
            if (at == text.length || text[at] == ' ') {
                if (at > start) {
                    words.add(new String(text, start, at - start, StandardCharsets.ISO_8859_1));
                }
                start = at + 1;
            }
        }
        return words;
    }

    /** Makes the text of this number. Texts of the same number are the same. */
    private static byte[] textOf(long number) {
        long state = number * 0x9E3779B97F4A7C15L | 1;
        StringBuilder text = new StringBuilder(TEXT_BYTES);
        while (text.length() + 8 < TEXT_BYTES) {
            state ^= state << 13;
            state ^= state >>> 7;
            state ^= state << 17;
            text.append('w').append(Long.remainderUnsigned(state, 150)).append(' ');
        }
        return text.toString().getBytes(StandardCharsets.ISO_8859_1);
    }

    /** What becomes of a text. */
    private record Edit(int chapter, int text, boolean isReplaced, byte[] source) {}

    /** Texts as they are now, by their versions. */
    private static final class Texts {
        private final long seed;
        private final long[] versions;
        private final int[] words;
        /** Words of all. */
        long count;

        Texts(long seed, int texts) {
            this.seed = seed;
            versions = new long[texts];
            words = new int[texts];
        }

        /** Returns a text in the version that it has. */
        byte[] source(int number) {
            byte[] source = textOf(Harness.mix(seed ^ number ^ versions[number] << 32));
            int now = words(source).size();
            count += now - words[number];
            words[number] = now;
            return source;
        }

        /** Makes up the edit of this number. */
        Edit edit(long edit, Harness.Random random) {
            int number = (int) random.below(versions.length);
            // One in four edits changes nothing that counts.
            versions[number] += edit % 4 == 0 ? 0 : 1;
            return new Edit(number / TEXTS, number % TEXTS, edit % 3 == 0, source(number));
        }
    }

    /** What builds have found. */
    private static final class Found {
        long sum;
        long errors;

        /** Adds a book's table, which has this many words in all. */
        void add(Map<String, Integer> table, long words) {
            long count = 0;
            for (Map.Entry<String, Integer> entry : table.entrySet()) {
                count += entry.getValue();
                long hash = entry.getValue();
                for (int at = 0; at < entry.getKey().length(); at++) {
                    hash = Harness.mix(hash ^ entry.getKey().charAt(at));
                }
                sum += hash;
            }
            errors += count == words ? 0 : 1;
            sum = Harness.mix(sum);
        }
    }

    public static void main(String[] arguments) {
        Harness harness = new Harness(arguments);
        int chapters = (int) Math.max(1, harness.dataBytes / TEXT_DATA_BYTES / TEXTS);
        Engine engine = new Engine(chapters);
        Texts texts = new Texts(harness.seed, chapters * TEXTS);
        Found found = new Found();
        for (int chapter = 0; chapter < chapters; chapter++) {
            int at = chapter;
            byte[][] sources = new byte[TEXTS][];
            Arrays.setAll(sources, text -> texts.source(at * TEXTS + text));
            harness.phase("fill", TEXTS, () -> {
                for (int text = 0; text < TEXTS; text++) {
                    engine.replace(at, text, sources[text]);
                }
                return null;
            });
        }
        found.add(harness.phase("fill", 0, engine::build), texts.count);
        Harness.Random random = new Harness.Random(harness.seed);
        for (long first = 0; first < harness.ops; first += EDITS_PER_BUILD) {
            List<Edit> edits = new ArrayList<>();
            for (long edit = first; edit < Math.min(harness.ops, first + EDITS_PER_BUILD); edit++) {
                edits.add(texts.edit(edit, random));
            }
            found.add(harness.phase("edits", edits.size(), () -> {
                for (Edit edit : edits) {
                    if (edit.isReplaced) {
                        engine.replace(edit.chapter, edit.text, edit.source);
                    } else {
                        engine.edit(edit.chapter, edit.text, edit.source);
                    }
                }
                return engine.build();
            }), texts.count);
        }
        // Tasks that were replaced are collected at some time.
        found.errors += engine.neighbours(0, TEXTS - 1).get(0) == TEXTS - 1 ? 0 : 1;
        harness.figure("computed", engine.computed);
        harness.end(Harness.mix(found.sum) ^ engine.computed, found.errors, engine);
    }
}
