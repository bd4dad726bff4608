// A plugin of qemu 7.2 that prints the instructions that a program executes between two hints, 4 bytes each. Debian
// brings no header for plugins.
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

struct qemu_plugin_tb;
struct qemu_plugin_insn;
typedef uint64_t plugin_id;

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* block);
struct qemu_plugin_insn* qemu_plugin_tb_get_insn(const struct qemu_plugin_tb* block, size_t index);
const void* qemu_plugin_insn_data(const struct qemu_plugin_insn* instruction);
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id id, void (*call)(plugin_id, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb* block, void (*call)(unsigned, void*), int flags,
                                          void* data);
void qemu_plugin_register_atexit_cb(plugin_id id, void (*call)(plugin_id, void*), void* data);

EXPORT int qemu_plugin_version = 1;
static const uint32_t hint = 0xd5032c9f;  // hint #100
static int is_counting;

struct block {
  int has_hint;
  size_t count;
  uint32_t words[];
};

// The few instructions beside a hint are left out.
static void executed(unsigned cpu, void* data) {
  const struct block* block = data;
  if (block->has_hint)
    is_counting = !is_counting;
  else if (is_counting)
    fwrite(block->words, sizeof hint, block->count, stdout);
}

static void translated(plugin_id id, struct qemu_plugin_tb* tb) {
  const size_t count = qemu_plugin_tb_n_insns(tb);
  struct block* block = calloc(1, sizeof *block + count * sizeof hint);
  block->count = count;
  for (size_t i = 0; i < count; i++) {
    memcpy(&block->words[i], qemu_plugin_insn_data(qemu_plugin_tb_get_insn(tb, i)), sizeof hint);
    block->has_hint |= block->words[i] == hint;
  }
  qemu_plugin_register_vcpu_tb_exec_cb(tb, executed, 0, block);
}

static void ended(plugin_id id, void* data) { fflush(stdout); }

EXPORT int qemu_plugin_install(plugin_id id, const void* info, int count, char** words) {
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, ended, NULL);
  return 0;
}
