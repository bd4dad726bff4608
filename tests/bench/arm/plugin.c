// A plugin of qemu 7.2 that prints how many instructions a program executed. Debian brings no header for plugins.
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))

struct qemu_plugin_tb;
typedef uint64_t plugin_id;

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* block);
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id id, void (*call)(plugin_id, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb* block, int add, void* counter, uint64_t count);
void qemu_plugin_register_atexit_cb(plugin_id id, void (*call)(plugin_id, void*), void* data);

EXPORT int qemu_plugin_version = 1;
static uint64_t executed;

static void translated(plugin_id id, struct qemu_plugin_tb* block) {
  qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &executed, qemu_plugin_tb_n_insns(block));
}

static void ended(plugin_id id, void* data) { fprintf(stderr, "%" PRIu64 "\n", executed); }

EXPORT int qemu_plugin_install(plugin_id id, const void* info, int count, char** words) {
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, ended, NULL);
  return 0;
}
