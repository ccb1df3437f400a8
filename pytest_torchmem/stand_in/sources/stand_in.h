#pragma once
#include <stddef.h>
/* driver.c */
void *stand_in_driver(const char *symbol);
int stand_in_mapped_device(const void *p);
/* runtime.c */
int stand_in_current(void);
int stand_in_initialised(int device);
int stand_in_account(int device, long bytes);
/* notes.c: what was answered without being true */
void stand_in_note(const char *name);
void stand_in_note_number(const char *name, int number);
void stand_in_resources(const char *kernel, int *regs, int *shared, int *threads);
